"""The members of a group with the workers of each: they evaluate together.

    member i                                ║ network     every other member
                                            ║
    map       its share, by its backend     ║             theirs
    exchange  its Result          ◄─────────╫───────────► theirs: one block each
    reduce    its partials        ◄─────────╫───────────► a sum in the order of the tree (fixed_order.py)

What must hold:

- An evaluation has one exchange of small objects, after which all members know the same: what each was asked to do and
  whether it succeeded. So an exception on one is raised on all, and all of them make the sum, or none does.
- Shares are fixed for an evaluation: within a member its backend moves chunks from worker to worker, and replaces
  workers. Nothing moves between members, whose messages are therefore known beforehand.
- A member that is interrupted leaves the group: what it would have sent next, the others would take for something else.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from batchopt._mapreduce.answers import Answer, Partial, forms_of
from batchopt._mapreduce.plan import runs as runs_of
from batchopt._mapreduce.plan import split_batch
from batchopt._mapreduce.reduce import Answers, Pattern, merge_answers
from batchopt._program.flat_module import Gradient
from batchopt.backends.base import CompressingBackend, Meanwhile, Run, WorkerInfo
from batchopt.backends.nodes.fixed_order import FixedOrderSum, whole_of
from batchopt.backends.nodes.group import Group
from batchopt.backends.nodes.placing import aligned
from batchopt.backends.nodes.result import NOTHING, Call, Infos, Result, status
from batchopt.backends.nodes.wire import Wire
from batchopt.backends.process.backend import ProcessBackend
from batchopt.backends.serial import SerialBackend
from batchopt.errors import NodesDifferError
from batchopt_workers.evaluate.tree import Node
from batchopt_workers.wire.orders import Cut, Kind, Order
from batchopt_workers.wire.packing import dumps

# The backend that evaluates for a member.
Local = SerialBackend | ProcessBackend


class Evaluation(NamedTuple):
    """The work that all members do together: an order and the run of each worker; and, if gradients are `compressed`,
    the number of the evaluation, which is the same when it is made again."""

    order: Order
    runs: Sequence[Run]
    compressed: int | None = None


class Team:
    """The members of `group`, each of which has the workers of some `ranks`, in its `local` backend; None if this one
    has none. `takers` get the sums: all, or the one at place 0. With `fixed_bits` these do not depend on which member
    has which ranks, unless gradients are compressed on the `wire`."""

    def __init__(
        self,
        group: Group,
        ranks: Sequence[range],
        takers: Sequence[int],
        fixed_bits: bool,
        wire: Wire | None = None,
        infos: Infos | None = None,
    ) -> None:
        self.group, self.ranks, self.wire = group, ranks, wire
        self.local: Local | None = None
        self._takers, self.fixed_bits = takers, fixed_bits
        self._sum = FixedOrderSum(group, takers)
        self._rows: list[torch.Tensor] = []  # of the last evaluation that collected any
        self.infos = Infos() if infos is None else infos
        self.behind: set[int] = set()  # members that could not take what they must have, as of the last exchange
        # Describes in what the members' calls differ; nothing, if they do not.
        self.differences: Callable[[Sequence[Call | None]], str] = lambda calls: ""
        self._reported: list[Any] = []  # the state of this member's workers, as sent last

    @property
    def _mine(self) -> range:
        """The ranks of this member's workers."""
        return self.ranks[self.group.place]

    def shares(self, runs: Sequence[Run], cut: Cut, is_exact: bool) -> Sequence[Run]:
        """Return the runs, in which the chunks of workers that are not there are distributed over the others. If chunks
        are fixed, and sums are to be exact, members get few complete subtrees."""
        shares = [last - first for first, last in runs]
        total, before, start = sum(shares), list(shares), min(first for first, last in runs if first < last)
        here = {rank for ranks in self.ranks for rank in ranks}
        if any(share and rank not in here for rank, share in enumerate(shares)):
            weights = [float(share) if rank in here else 0.0 for rank, share in enumerate(shares)]
            weights = weights if any(weights) else [float(rank in here) for rank in range(len(shares))]
            shares = split_batch(total, weights)
        if self.fixed_bits and is_exact and total == cut.chunks:
            shares = aligned(shares, [ranks for ranks in self.ranks if ranks])
        return runs if shares == before else [(start + first, start + last) for first, last in runs_of(shares)]

    # ---- evaluating

    def evaluate(
        self,
        cut: Cut,
        evaluation: Evaluation,
        call: Call | None = None,
        meanwhile: Meanwhile | None = None,
        failed: BaseException | None = None,
    ) -> list[Answer]:
        """Carry out an order, each run by the worker of that rank or another one of its member; return the answers of
        all workers, on members that take them. If this member has `failed` already, it only reports that. Raises what
        any member raises, `NodesDifferError` and `NodeLostError`."""
        began, (order, runs, compressed) = time.perf_counter(), evaluation
        holders = [
            i for i, of in enumerate(self.ranks) if any(first < last for first, last in runs[of.start : of.stop])
        ]
        # Only complete batches in fixed chunks have a tree that does not depend on which member has which chunks. Else
        # each member merges all of its own, and these sums are the leaves of another tree.
        is_complete = sum(last - first for first, last in runs) == cut.chunks
        is_tree = self.fixed_bits and compressed is None and is_complete
        # Inboxes are opened before computing, so that the member that is done first can send at once.
        self.group.open()
        result, vectors, error = Result(), list[torch.Tensor](), failed
        if failed is None:
            try:
                result, vectors = self._map(cut, evaluation, holders, is_tree, meanwhile, began)
            except KeyboardInterrupt:
                self.group.close()
                raise
            except BaseException as raised:
                error = raised
        if error is not None:
            result = Result.failed(error, is_behind=failed is not None)
        found = self._exchange(result, call, error)
        if compressed is not None and self.wire is not None:
            self.wire.delivered()
        return self._reduce(cut, order, found, vectors, cut.chunks if is_tree else len(holders), began)

    def _map(
        self,
        cut: Cut,
        evaluation: Evaluation,
        holders: Sequence[int],
        is_tree: bool,
        meanwhile: Meanwhile | None,
        began: float,
    ) -> tuple[Result, list[torch.Tensor]]:
        """Return this member's part, and the vectors of its partials. These are merged as far as the tree of chunks
        allows or, if it is not that, to a single one; `holders` are the members with a share."""
        order, all_runs, compressed = evaluation
        runs = all_runs[self._mine.start : self._mine.stop]
        shares = [run for run in runs if run[0] < run[1]]
        answers: Sequence[Answer] = []
        if self.local is not None and shares:
            answers = self.local.evaluate(cut, order, runs, meanwhile)
        elif meanwhile is not None:
            meanwhile()
        partials = merge_answers(answers, cut.chunks) if answers else []
        if partials and not is_tree:
            leaves = [(Node(0, i), partial) for i, (_, partial) in enumerate(partials)]
            ((_, partial),) = merge_answers([Answer(0, 0, 0.0, leaves)], len(leaves))
            partials = [(Node(0, holders.index(self.group.place)), partial)]
        vectors, forms, is_coded = [partial.gradient.cpu() for _, partial in partials], forms_of(answers), False
        if compressed is not None:
            assert self.wire is not None
            samples = range(cut.bounds[shares[0][0]], cut.bounds[shares[-1][1]]) if shares else range(0)
            coded = self.wire.encode(vectors, len(holders), compressed, samples)
            vectors, is_coded = coded or vectors, bool(coded)
        result = Result(
            answers=[self._sent(answer, -began) for answer in answers],
            returned=dumps([answer.results for answer in answers]) if any(a.results for a in answers) else b"",
            forms=dumps(forms) if forms else b"",
            partials=[(n, p._replace(gradient=v)) for (n, p), v in zip(partials, vectors, strict=True)],
            size=len(vectors[0]) if vectors else 0,
            dtype=vectors[0].dtype if vectors else NOTHING.dtype,
            is_coded=is_coded,
        )
        return result if result.is_short else result.bare, vectors

    def _sent(self, answer: Answer, later: float) -> Answer:
        """Return an answer to be sent: with the rank among all workers, and without what is sent beside it."""
        return moved(answer, later, rank=self._mine.start + answer.rank, partials=[], results={}, forms={})

    def _exchange(self, result: Result, call: Call | None, error: BaseException | None = None) -> list[Result]:
        """Exchange results with all members. Raises the exception that any of them reports, the same on all members."""
        group, whole = self.group, result._replace(call=call, infos=self._news())
        # Members that do not take the sum only need to know its form, and whether all succeeded.
        if len(self._takers) == group.size:
            found: list[Result] = group.exchange(whole)
        else:
            found = group.gather(whole, whole.bare._replace(answers=(), returned=b""))
        self.behind = {place for place, each in enumerate(found) if each.is_behind}
        if any(each.call != call for each in found) and (text := self.differences([each.call for each in found])):
            group.close()
            raise NodesDifferError(
                f"the ranks have diverged: {text}. Seed them alike (torch.manual_seed), and give all of them the "
                "same program, batches and calls; keep what differs on purpose, such as a rank or a path, outside of "
                "module and losses"
            )
        for each in found:
            self.infos.learn(each.infos or ())
        for place, each in enumerate(found):
            raised = each.error_of(group.names[place], self.ranks[place].start)
            if raised is not None:
                raise error if error is not None and place == group.place and each.error is None else raised
        return found

    def _news(self) -> list[WorkerInfo] | None:
        """Return the records of this member's workers, if they have changed."""
        infos = [] if self.local is None else self.local.workers
        now = [status(info) for info in infos]
        if now == self._reported:
            return None
        self._reported = now
        return [replace(info, rank=self._mine.start + info.rank) for info in infos]

    def _reduce(
        self,
        cut: Cut,
        order: Order,
        found: Sequence[Result],
        vectors: Sequence[torch.Tensor],
        chunks: int,
        began: float,
    ) -> list[Answer]:
        """Return the answers of all workers, of which the first one has the sum of everything; nothing on members that
        do not take it. `chunks`: the leaves of the tree of all sums."""
        whole = self._total(found, vectors, chunks)
        forms = [pickle.loads(each.forms) if each.forms else {} for each in found]
        self._rows = self._collected(forms, cut) if order.kind is not Kind.TOTAL else []
        if whole is None:
            return []
        answers = []
        for each, of_chunks in zip(found, forms, strict=True):
            results = pickle.loads(each.returned) if each.returned else [{} for _ in each.answers]
            pairs = zip(each.answers, results, strict=True)
            answers += [moved(answer, began, results=of_one) for answer, of_one in pairs]
            if of_chunks:
                answers[-1] = replace(answers[-1], forms=of_chunks)
        root = Node(max(cut.chunks - 1, 0).bit_length(), 0)
        answers[0] = replace(answers[0], partials=[(root, whole)])
        return answers

    def _total(self, found: Sequence[Result], vectors: Sequence[torch.Tensor], chunks: int) -> Partial | None:
        """Return the sum of all partials, on members that take it."""
        place, takes = self.group.place, self.group.place in self._takers
        values = [[partial.gradient for _, partial in each.partials] for each in found]
        out: torch.Tensor | None = None
        if all(each.is_short for each in found) or any(each.is_coded for each in found):
            coming = [each.memory() if takes else [] for each in found]
            self.group.trade([] if found[place].is_short else vectors, coming, self._takers)
            coming[place] = list(vectors)
            values = [of or inside for of, inside in zip(coming, values, strict=True)]
        else:
            lead = next(each for each in found if each.partials)
            nodes = [[node for node, _ in each.partials] for each in found]
            out = self._sum(nodes, chunks, lead.size, lead.dtype, vectors)
        if not takes:
            return None
        partials = []
        for each, of in zip(found, values, strict=True):
            if each.is_coded and self.wire is not None:
                of = [self.wire.decode(code, chunks) for code in of]
            partials += [(n, p._replace(gradient=vector)) for (n, p), vector in zip(each.partials, of, strict=True)]
        added = torch.empty_like(partials[0][1].gradient)
        whole = whole_of(partials, chunks, added)
        return Partial(whole.losses, added if out is None else out, whole.changes, whole.used)

    # ---- other exchanges

    def exchange(
        self, call: Call | None = None, value: Any = None, failed: BaseException | None = None, is_behind: bool = False
    ) -> list[Any]:
        """Exchange values with all members, after checking that all make the same call. Raises what `evaluate`
        raises."""
        result = Result(value=value) if failed is None else Result.failed(failed, is_behind)
        return [each.value for each in self._exchange(result, call, failed)]

    # ---- rows

    def take_rows(self) -> list[torch.Tensor]:
        """Return the rows of the last evaluation, which are the caller's from now on."""
        found, self._rows = self._rows, []
        return found

    def _collected(self, forms: Sequence[Mapping[int, Any]], cut: Cut) -> list[torch.Tensor]:
        """Return the rows written by all members' workers, on members that take them; none if there are none, or of
        several forms."""
        kinds = {form.columns for of_chunks in forms for form in of_chunks.values()}
        if len(kinds) != 1 or not (columns := next(iter(kinds))):
            return []
        samples, mine = cut.bounds[-1], forms[self.group.place]
        here: list[torch.Tensor] = self.local.collected(columns, samples) if mine and self.local is not None else []
        whole = here
        if self.group.place not in self._takers:
            whole = []
        elif not here:
            whole = [torch.empty((samples, *c.shape), dtype=c.dtype, device="cpu") for c in columns]
        self.group.trade(_rows_of(here, mine, cut), [_rows_of(whole, of, cut) for of in forms], self._takers)
        return whole


class TeamBackend(CompressingBackend):
    """A backend whose workers are those of a team: evaluations with and without compression are one."""

    def evaluate(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        return Answers(Pattern(self._evaluate(cut, order, runs, meanwhile), cut.chunks))

    def evaluate_compressed(
        self,
        cut: Cut,
        order: Order,
        runs: Sequence[Run],
        meanwhile: Meanwhile | None = None,
        into: Gradient | None = None,
    ) -> Answers:
        return Answers(Pattern(self._evaluate(cut, order, runs, meanwhile, order.evaluation), cut.chunks))

    @abstractmethod
    def _evaluate(
        self, cut: Cut, order: Order, runs: Sequence[Run], meanwhile: Meanwhile | None, compressed: int | None = None
    ) -> list[Answer]:
        """Carry out an order, with gradients `compressed` as those of an evaluation of that number."""


def moved(answer: Answer, later: float, **changes: Any) -> Answer:
    """Return the answer with its spans so many seconds later, and other changes."""
    return replace(answer, spans=[span._replace(began=span.began + later) for span in answer.spans], **changes)


def _rows_of(tensors: Sequence[torch.Tensor], forms: Mapping[int, Any], cut: Cut) -> list[torch.Tensor]:
    """Return the rows of the samples of these chunks, in runs."""
    found = []
    for _, run in groupby(enumerate(sorted(forms)), key=lambda item: item[1] - item[0]):
        chunks = [chunk for _, chunk in run]
        found += [tensor[cut.bounds[chunks[0]] : cut.bounds[chunks[-1] + 1]] for tensor in tensors]
    return [rows for rows in found if rows.numel()]
