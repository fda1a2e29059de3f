"""Evaluate f(X) and df/dX of a whole batch on N workers, exactly, for any optimizer."""

import importlib
import typing

from batchopt._data.epochs import Batches as Batches
from batchopt._data.terms import Term as Term
from batchopt._data.terms import Weighted as Weighted
from batchopt._mapreduce.plan import split_batch as split_batch
from batchopt.adaptive import resample as resample
from batchopt.asynchronous import hogwild as hogwild
from batchopt.doctor import Diagnosis as Diagnosis
from batchopt.errors import AllWorkersLostError as AllWorkersLostError
from batchopt.errors import BatchoptError as BatchoptError
from batchopt.errors import CheckpointError as CheckpointError
from batchopt.errors import NodeLostError as NodeLostError
from batchopt.errors import NodesDifferError as NodesDifferError
from batchopt.errors import NonFiniteError as NonFiniteError
from batchopt.errors import PoisonChunkError as PoisonChunkError
from batchopt.errors import WorkerError as WorkerError
from batchopt.errors import WorkerLostError as WorkerLostError
from batchopt.errors import WorkerStartError as WorkerStartError
from batchopt.optim import CG as CG
from batchopt.optim import LBFGS as LBFGS
from batchopt.optim import SVRG as SVRG
from batchopt.optim import Iteration as Iteration
from batchopt.optim import LevenbergMarquardt as LevenbergMarquardt
from batchopt.optim import Result as Result
from batchopt.optim import SSBroyden as SSBroyden
from batchopt.optim import Status as Status
from batchopt.optimizer import BatchOptimizer as BatchOptimizer
from batchopt_workers.worker import Sample as Sample
from batchopt_workers.worker import Worker as Worker

if typing.TYPE_CHECKING:
    from batchopt import ignite as ignite

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`batchopt.ignite` is imported when it is first used: it needs pytorch-ignite."""
    if name == "ignite":
        return importlib.import_module("batchopt.ignite")
    raise AttributeError(f"module 'batchopt' has no attribute {name!r}")
