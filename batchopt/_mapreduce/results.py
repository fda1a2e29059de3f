"""Combining the results of a function for each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchopt._mapreduce.answers import Answer
from batchopt_workers.tasks.forms import Form


def forms_of(answers: Sequence[Answer]) -> dict[int, Form]:
    """Return the form of each chunk's result, in the order of chunks."""
    found = {chunk: form for answer in answers for chunk, form in answer.forms.items()}
    return dict(sorted(found.items()))


def common_form(forms: Mapping[int, Form], bounds: Sequence[int]) -> Form:
    """Return the common form of the results of all chunks; `objects` are those of the whole batch, if at least one
    chunk can only be read as such.

    Raise `ValueError`, which names the chunk, if there is no such form, or more than one.
    """
    first = next(iter(forms))
    if all(form.objects is not None for form in forms.values()) and any(not form.columns for form in forms.values()):
        return Form((), None, [item for form in forms.values() for item in form.objects or ()])
    for chunk, form in forms.items():
        if form.columns != forms[first].columns or not form.columns:
            raise ValueError(
                f"the function returned {_described(form)} for chunk {chunk} (samples {bounds[chunk]}.."
                f"{bounds[chunk + 1] - 1}), and {_described(forms[first])} for chunk {first}: results need one "
                "structure, with the same dtypes and the same shapes but for the samples; else return a list with one "
                "object a sample"
            )
    if bounds[-1] > 1 and all(form.objects is not None for form in forms.values()):
        raise ValueError(
            "the function returned lists of tensors, of which each is as long as the list: one tensor a sample, or one "
            "row a sample in each tensor? For the former use torch.stack, for the latter return a tuple"
        )
    return Form(forms[first].columns, forms[first].skeleton)


def _described(form: Form) -> Any:
    return ", ".join(map(str, form.columns)) or "a list of objects"
