"""The members of a group with the workers of each: they evaluate together.

    member i                                ║ network     every other member
                                            ║
    its share, by its local backend         ║             theirs
    what was called, losses, times ◄────────╫───────────► the same of theirs: one block each
    its partials                  ◄─────────╫───────────► a sum in the order of the tree (fixed_order.py)

An evaluation has one exchange of small objects, by which all members learn what each was asked to do and whether it
succeeded, and then the sum. Shares are fixed for an evaluation: within a member its backend moves chunks from worker to
worker, and replaces workers. An exception on one member is raised on all.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import torch

from batchopt._mapreduce.answers import Answer, Partial, Span, forms_of
from batchopt._mapreduce.compression import DoesNotFit
from batchopt._mapreduce.reduce import merge_answers
from batchopt.backends.base import Meanwhile, Run, WorkerInfo
from batchopt.backends.nodes.contribution import (
    Call,
    Contribution,
    GradientResiduals,
    Infos,
    NodeFailure,
    Round,
    Summed,
    Work,
    differences,
    status,
)
from batchopt.backends.nodes.fixed_order import FixedOrderSum, Held, Vectors, gathered, whole_of
from batchopt.backends.nodes.group import Group
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.serial import SerialBackend
from batchopt.errors import NodesDifferError
from batchopt_workers.data.memory import octets
from batchopt_workers.data.packing import dumps
from batchopt_workers.map.tree import Node
from batchopt_workers.process.messages import Cut, Kind, Order
from batchopt_workers.tasks.forms import Column

# The backend that evaluates for a member.
Local = SerialBackend | ProcessBackend


class Team:
    """The members of `group`, each of which has the workers of some `ranks`, in its `local` backend; None if this one
    has none. `takers` get the sums. With `fixed_bits` these do not depend on which member has which ranks, unless
    gradients are compressed, which leaves `residuals` on each member."""

    def __init__(
        self,
        group: Group,
        local: Local | None,
        ranks: Sequence[range],
        takers: Sequence[int],
        fixed_bits: bool,
        residuals: GradientResiduals | None = None,
    ) -> None:
        self.group, self.ranks, self.residuals = group, ranks, residuals
        self.local, self._takers, self.fixed_bits = local, takers, fixed_bits
        self._sum = FixedOrderSum(group, takers)
        self.rows: list[torch.Tensor] = []  # of the last evaluation that collected any
        self.infos = Infos()
        self.behind: set[int] = set()  # members that could not make their updates, as of the last exchange
        self.in_full: Callable[[list[Call]], list[Call]] = list  # of calls that differ, with what digests stand for
        self._reported: list[Any] = []  # the state of this member's workers, as sent last

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        call: Call,
        meanwhile: Meanwhile | None = None,
        compressed: Round | None = None,
        failed: BaseException | None = None,
    ) -> list[Answer]:
        """Carry out an order, each of these runs by the worker of that rank or another one of its member; return the
        answers of all workers, on members that take them. If this member has `failed` already, it only reports that.
        Raises what any member raises, `NodesDifferError` and `NodeLostError`."""
        began, mine = time.perf_counter(), self.ranks[self.group.place]
        # Inboxes are opened before computing, so that the member that is done first can send at once.
        self.group.open()
        answers: Sequence[Answer] = []
        failure = failed
        if failed is None:
            answers, failure = self._map(cut, order, runs[mine.start : mine.stop], meanwhile)
        is_whole = sum(last - first for first, last in runs) == cut.chunks
        # Only complete batches in fixed chunks have a tree that does not depend on which member has which chunks.
        is_tree = self.fixed_bits and compressed is None and is_whole
        partials = self._merged(answers, cut, is_tree)
        vectors = [partial.gradient.cpu() for _, partial in partials]
        coded: list[torch.Tensor] = []
        if compressed is not None and failure is None:
            coded, failure = self._coded(vectors, cut, runs, compressed)
            vectors = coded or vectors
        contribution = Contribution(call, infos=self._news(), is_behind=failed is not None, is_coded=bool(coded))
        if failure is not None:
            contribution = contribution._replace(failure=NodeFailure.of(failure))
        else:
            contribution = self._contribution(contribution, answers, partials, vectors, began)
        # Members that do not take the sum only need to know its form, and whether all succeeded.
        brief = contribution._replace(vectors=b"", work=())
        # The only exchange of an evaluation, after which all members agree on its outcome.
        found: list[Contribution] = self.group.exchange(contribution, brief, self._takers)
        self._check(found, failure)
        held = _held(found, cut.chunks if is_tree else None)
        whole = self._total(found, held, vectors, compressed is not None)
        forms = [pickle.loads(each.forms) if each.forms else {} for each in found]
        self.rows = self._collected(forms, cut) if order.kind is not Kind.TOTAL else []
        return [] if whole is None else self._answers(found, cut, whole, forms, began)

    def _map(
        self, cut: Cut, order: Order, runs: Sequence[Run], meanwhile: Meanwhile | None
    ) -> tuple[Sequence[Answer], BaseException | None]:
        """Return the answers of this member's workers, or the exception that they raise."""
        if self.local is None or all(first == last for first, last in runs):
            if meanwhile is not None:
                meanwhile()
            return [], None
        try:
            return self.local.evaluate(cut, order, runs, meanwhile), None
        except KeyboardInterrupt:
            self.group.close()
            raise
        except BaseException as error:
            return [], error

    def _merged(self, answers: Sequence[Answer], cut: Cut, is_tree: bool) -> list[tuple[Node, Partial]]:
        """Return this member's partials, merged as far as the tree of chunks allows, or to a single one."""
        partials = merge_answers(answers, cut.chunks) if answers else []
        if is_tree or len(partials) < 2:
            return partials
        leaves = [(Node(0, i), partial) for i, (_, partial) in enumerate(partials)]
        return merge_answers([Answer(0, 0, 0.0, leaves)], len(leaves))

    def _coded(
        self, vectors: Sequence[torch.Tensor], cut: Cut, runs: Sequence[Run], compressed: Round
    ) -> tuple[list[torch.Tensor], DoesNotFit | None]:
        """Return the code of this member's gradient, if that is finite; or the reason why there is none."""
        assert self.residuals is not None
        if not vectors:
            self.residuals.pass_by(compressed)
            return [], None
        members = sum(any(first < last for first, last in runs[r.start : r.stop]) for r in self.ranks)
        try:
            code = self.residuals.encode(vectors[0], members, compressed)
        except DoesNotFit as error:
            mine = [run for run in runs[self._first : self.ranks[self.group.place].stop] if run[0] < run[1]]
            error.samples = range(cut.bounds[mine[0][0]], cut.bounds[mine[-1][1]])
            return [], error
        return ([] if code is None else [code]), None

    def _total(
        self, found: Sequence[Contribution], held: Held, vectors: Sequence[torch.Tensor], are_coded: bool
    ) -> Partial | None:
        """Return the sum of everything, on members that take it."""
        takes = self.group.place in self._takers
        if not are_coded and not all(each.is_short for each in found):
            vector = self._sum(held, vectors)
            return None if vector is None else _sum_of(found, held, None)._replace(gradient=vector)
        forms = [Vectors(0 if each.is_short else len(each.partials), each.size, each.dtype) for each in found]
        long = [] if found[self.group.place].is_short else vectors
        values = gathered(self.group, forms, long, self._takers)
        if not takes:
            return None
        values = [each.read() if each.is_short and each.size else of for each, of in zip(found, values, strict=True)]
        if self.residuals is not None and are_coded:
            decode, members = self.residuals.decode, held.chunks
            pairs = zip(found, values, strict=True)
            values = [[decode(code, members) for code in of] if each.is_coded else of for each, of in pairs]
        return _sum_of(found, held, values if held.size else None)

    def _contribution(
        self,
        contribution: Contribution,
        answers: Sequence[Answer],
        partials: Sequence[tuple[Node, Partial]],
        vectors: Sequence[torch.Tensor],
        began: float,
    ) -> Contribution:
        """Return the contribution with all results."""
        vector, forms = vectors[0] if vectors else _NOTHING, forms_of(answers)
        found = contribution._replace(
            work=[self._work(answer, began) for answer in answers],
            partials=[Summed(node, p.losses, p.used, p.changes.numpy().tobytes()) for node, p in partials],
            size=len(vector),
            dtype=vector.dtype,
            forms=dumps(forms) if forms else b"",
        )
        if found.is_short:
            return found._replace(vectors=b"".join(octets(vector).numpy().tobytes() for vector in vectors))
        return found

    @property
    def _first(self) -> int:
        return self.ranks[self.group.place].start

    def _work(self, answer: Answer, began: float) -> Work:
        spans = [span._replace(began=span.began - began) for span in answer.spans]
        results = dumps(answer.results) if answer.results else b""
        return Work(self._first + answer.rank, answer.samples, answer.seconds, spans, results, answer.drew)

    def _news(self) -> list[WorkerInfo] | None:
        """Return the records of this member's workers, if they have changed."""
        infos = [] if self.local is None else self.local.workers
        now = [status(info) for info in infos]
        if now == self._reported:
            return None
        self._reported = now
        return [replace(info, rank=self._first + info.rank) for info in infos]

    # ---- other exchanges

    def exchange(
        self, call: Call, value: Any = None, failure: BaseException | None = None, is_behind: bool = False
    ) -> list[Any]:
        """Exchange values with all members, after checking that all make the same call. Raises what `evaluate`
        raises."""
        failed = None if failure is None else NodeFailure.of(failure)
        mine = Contribution(call, failed, infos=self._news(), value=value, is_behind=is_behind)
        found: list[Contribution] = self.group.exchange(mine)
        self._check(found, failure)
        return [each.value for each in found]

    def residuals_after(self, call: Call, evaluation: int) -> dict[int, torch.Tensor]:
        """Return the residuals of an evaluation, of each member that has workers."""
        mine = None if self.residuals is None else self.residuals.after(evaluation)
        found = [value for ranks, value in zip(self.ranks, self.exchange(call, mine), strict=True) if ranks]
        return {i: value for i, value in enumerate(found) if value is not None}

    def restore_residuals(self, evaluation: int, of_all: Mapping[int, torch.Tensor]) -> None:
        """Restore the residuals of an evaluation of another run, or of an earlier state of this one."""
        members = [place for place, ranks in enumerate(self.ranks) if ranks]
        if self.residuals is not None and self.group.place in members:
            self.residuals.restore(evaluation, of_all, members.index(self.group.place), len(members))

    def _check(self, found: Sequence[Contribution], failure: BaseException | None) -> None:
        """Raise the error that any of them reports, the same on all members."""
        self.behind = {place for place, each in enumerate(found) if each.is_behind}
        calls = [each.call for each in found]
        if any(call != calls[0] for call in calls):
            calls = self.in_full(calls)
        differing = differences(calls, self.group.names)
        if differing:
            self.group.close()
            raise NodesDifferError(
                f"the ranks have diverged: {differing}. Seed them alike (torch.manual_seed), and give all of them the "
                "same program, batches and calls; keep what differs on purpose, such as a rank or a path, outside of "
                "module and losses"
            )
        for each in found:
            if each.infos is not None:
                self.infos.learn(each.infos)
        for place, each in enumerate(found):
            if each.failure is not None:
                if each.failure.error is None and place == self.group.place and failure is not None:
                    raise failure
                raise each.failure.error_of(self.group.names[place], self.ranks[place].start)

    # ---- the sum

    def _answers(
        self,
        found: Sequence[Contribution],
        cut: Cut,
        whole: Partial,
        forms: Sequence[dict[int, Any]],
        began: float,
    ) -> list[Answer]:
        """Return the answers of all workers; the first one has the sum of everything."""
        answers = []
        for each, of_chunks in zip(found, forms, strict=True):
            for rank, samples, seconds, spans, results, drew in each.work:
                here = [Span(began + span[0], *span[1:]) for span in spans]
                values = pickle.loads(results) if results else {}
                answers.append(Answer(rank, samples, seconds, [], values, here, drew))
            if of_chunks:
                answers[-1] = replace(answers[-1], forms=of_chunks)
        root = Node(max(cut.chunks - 1, 0).bit_length(), 0)
        answers[0] = replace(answers[0], partials=[(root, whole)])
        return answers

    # ---- rows

    def _collected(self, forms: Sequence[dict[int, Any]], cut: Cut) -> list[torch.Tensor]:
        """Return the rows written by all members' workers, on members that take them; none if there are none, or of
        several forms."""
        kinds = {form.columns for of_chunks in forms for form in of_chunks.values()}
        if len(kinds) != 1 or not (columns := next(iter(kinds))):
            return []
        group, samples = self.group, cut.bounds[-1]
        takes, mine = group.place in self._takers, forms[group.place]
        local = self.local.collected(columns, samples) if mine and self.local is not None else []
        whole = local if local and takes else _rows(columns, samples) if takes else []
        for other in group.others:
            if takes:
                for rows in _rows_of(whole, forms[other], cut):
                    group.receive(rows, other)
            if other in self._takers:
                for rows in _rows_of(local, mine, cut):
                    group.send(rows, other)
        group.wait()
        return whole


_NOTHING = torch.empty(0, dtype=torch.float64, device="cpu")


def _rows(columns: Sequence[Column], samples: int) -> list[torch.Tensor]:
    return [torch.empty((samples, *c.shape), dtype=c.dtype, device="cpu") for c in columns]


def _held(found: Sequence[Contribution], chunks: int | None) -> Held:
    """Return the places of the members' vectors: in the tree of `chunks` or, if that is None, in one of the members."""
    size, dtype = next(((each.size, each.dtype) for each in found if each.partials), (0, torch.float64))
    if chunks is not None:
        return Held([[summed.node for summed in each.partials] for each in found], chunks, size, dtype)
    numbers = count()
    places = [[Node(0, next(numbers))] if each.partials else [] for each in found]
    return Held(places, next(numbers), size, dtype)


def _sum_of(found: Sequence[Contribution], held: Held, values: Sequence[Sequence[torch.Tensor]] | None) -> Partial:
    """Return the sum of all partials: with these vectors, by member, or without any."""
    partials = []
    for i, (nodes, each) in enumerate(zip(held.places, found, strict=True)):
        for k, (node, (_, losses, used, changes)) in enumerate(zip(nodes, each.partials, strict=True)):
            taken = torch.frombuffer(bytearray(changes), dtype=torch.float64) if changes else _NOTHING.clone()
            partials.append((node, Partial(losses, _NOTHING if values is None else values[i][k], taken, used)))
    out = _NOTHING if values is None else torch.empty_like(partials[0][1].gradient)
    whole = whole_of(partials, held.chunks, out)
    return Partial(whole.losses, out, whole.changes, whole.used)


def _rows_of(tensors: Sequence[torch.Tensor], forms: Mapping[int, Any], cut: Cut) -> list[torch.Tensor]:
    """Return the rows of the samples of these chunks, in runs."""
    found = []
    for _, run in groupby(enumerate(sorted(forms)), key=lambda item: item[1] - item[0]):
        chunks = [chunk for _, chunk in run]
        found += [tensor[cut.bounds[chunks[0]] : cut.bounds[chunks[-1] + 1]] for tensor in tensors]
    return [rows for rows in found if rows.numel()]
