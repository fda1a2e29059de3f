"""A process that compiles evaluations: it is sent programs without elements, and writes libraries for all workers.

It is apart from the workers and from the user's process, because tracing runs the user's code on tensors that have no
elements, which it may keep in its objects, and because the compiler takes its own memory, threads and time.

    parent  ── request (pickled, its standard input) ──►  trace ─► seen before? ─► compile ─► rename into the directory
            ◄── replies (pickled, its standard output) ──
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from batchopt_workers.evaluate.draws import other_states
from batchopt_workers.evaluate.objective import Objective
from batchopt_workers.evaluate.program import Program
from batchopt_workers.evaluate.state import places_of_state
from batchopt_workers.life.parent import end_with
from batchopt_workers.life.torch_settings import set_module_hooks
from batchopt_workers.shortcuts.form import Artifact, PackedPiece, Reply, Request
from batchopt_workers.shortcuts.trace import Fakes, Traced, Untraceable, trace
from batchopt_workers.watch.graph import Found, Part
from batchopt_workers.watch.record import Record
from batchopt_workers.wire.packing import assemble

# Of this file and of what a library expects: libraries of another one are compiled again.
VERSION = 2


class _Objects(Record):
    """A record of what Python objects hold, without what tensors do."""

    def _look_inside(self, found: Found) -> Iterable[Part]:
        return () if isinstance(found.obj, torch.Tensor) else super()._look_inside(found)


def carry_out(request: Request) -> Reply:
    """Trace and compile what is requested."""
    began = time.perf_counter()
    torch.set_num_threads(request.threads)
    request.settings.apply()
    found = {piece.form: _compiled(request, piece) for piece in request.pieces}
    return Reply(found, time.perf_counter() - began)


def _compiled(request: Request, piece: PackedPiece) -> Artifact | str:
    """Return the artifact for pieces like this one, compiled unless it is there; or why there is none."""
    try:
        with request.settings.contexts():
            graph = traced(request, piece)
    except Untraceable as error:
        return str(error)
    except Exception as error:  # of the user's code, and of torch's many ways to refuse
        return _told(error)
    fewest, most = graph.range_around(piece.samples, piece.most)
    key = _key(graph, request)
    path = os.path.join(request.directory, f"{key}.so")
    if not os.path.exists(path):
        try:
            # an index out of range is an exception, which would end the process if it left a thread of OpenMP
            _compile(graph, path, 1 if graph.has_integers else request.threads)
        except Exception as error:  # of inductor, and of the C++ compiler
            return f"it cannot be compiled: {_told(error)}"
    return Artifact(key, path, piece.form, fewest, most, graph.inputs, graph.used, graph.written)


def _told(error: Exception) -> str:
    """Return the first line of an error of others."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def traced(request: Request, piece: PackedPiece) -> Traced:
    """Trace the evaluation of a piece. Raise `Untraceable`, and whatever the user's code raises."""
    fakes = Fakes()
    parameters = [fakes.like(placement) for placement in request.parameters]
    tensors = [fakes.like(placement) for placement in request.placements]
    own = [dict(vars(parameter)) for parameter in parameters]
    program: Program = assemble(request.program, tensors, parameters)
    for parameter, attributes in zip(parameters, own, strict=True):  # by which a tensor knows that it is such a one
        vars(parameter).update(attributes)
    set_module_hooks(program.module_hooks)
    rows = zip(piece.placements, piece.form.by_sample, strict=True)
    samples = [fakes.like(placement, by_sample) for placement, by_sample in rows]
    inputs, targets, attributes = assemble(piece.data, samples)
    objective = Objective(program.module, program.criterion, program.loss_fns[piece.form.term])

    def loss() -> torch.Tensor:
        output, value = objective(inputs, targets, attributes)
        if objective.compares_pairs:
            objective.check_pairs(output, targets)
        return value

    statistics = [tensor for tensor, _ in places_of_state(program.module)]
    roots = {"the module": program.module, "the criterion": program.criterion, "the loss": program.loss_fns}
    record, states = _Objects(roots, functions=True), other_states()
    found = trace(fakes, loss, parameters, statistics, tensors, samples)
    if not record.looks_the_same():
        raise Untraceable("it changes Python objects (an attribute, a list, a counter), which a graph would not")
    if states != other_states():
        raise Untraceable("it draws random numbers in Python, from NumPy or `random`")
    return found


def _key(graph: Traced, request: Request) -> str:
    """Return what the bits of results depend on, on one machine."""
    version = VERSION, torch.__version__, torch.version.git_version, request.threads, request.settings, _processor()
    found = hashlib.sha256(graph.digest() + repr(version).encode())
    found.update(repr((graph.inputs, graph.used, graph.written)).encode())
    return found.hexdigest()


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
    return torch.backends.cpu.get_cpu_capability()


def _compile(graph: Traced, path: str, threads: int) -> None:
    """Compile a graph to the library `path`, which appears there complete."""
    from torch._inductor import aot_compile, config
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_aot = _refuse  # type: ignore[method-assign,assignment]

    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as directory:
        made = os.path.join(directory, "compiled.so")
        settings = {"cpp.threads": threads, "compile_threads": 1, "fallback_random": True}
        for example in graph.examples:
            if isinstance(example, FakeTensor):  # literals of the code have elements
                example.fake_mode.allow_non_fake_inputs = True
        with config.patch(settings):
            found: Any = aot_compile(graph.graph, graph.examples, options={"aot_inductor.output_path": made})
        os.chmod(found, 0o600)
        os.rename(found, path)


def _refuse(wrapper: object, operation: object, *_: object) -> None:
    """Raise an error, before the C++ compiler is called, for an operation that only Python can call."""
    raise NotImplementedError(f"compiled code cannot call {operation}")


def main(leash: int) -> None:
    """Serve the process that has started this one. The standard output is for replies alone: what the user's code
    prints is dropped. `leash`: a descriptor; see `end_with`."""
    threading.Thread(target=end_with, args=(os.getppid(), leash), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")  # the workers issue them, too
    os.nice(5)  # evaluations go on meanwhile
    while True:
        try:
            reply: Reply | str = carry_out(pickle.load(sys.stdin.buffer))
        except Exception as error:  # whatever it is, somebody waits for an answer
            reply = _told(error)
        pickle.dump(reply, replies)
        replies.flush()
