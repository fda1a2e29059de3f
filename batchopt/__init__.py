"""Full-batch optimizers for PyTorch (L-BFGS, Levenberg-Marquardt, SSBroyden, SciPy's) on all cores of your machines,
with the loss and gradient of one process.
"""

from batchopt import training as training
from batchopt._data.epochs import Batches
from batchopt._data.terms import Penalty, Term, Weighted
from batchopt._mapreduce.plan import split_batch
from batchopt.errors import (
    AllWorkersLostError,
    BatchoptError,
    CheckpointError,
    CompileError,
    NodeLostError,
    NodesDifferError,
    NonFiniteError,
    PoisonChunkError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
)
from batchopt.extending import Evaluated, Observer
from batchopt.extras.covariance import Covariance
from batchopt.extras.doctor import Diagnosis
from batchopt.extras.hogwild import hogwild
from batchopt.extras.resampling import resample
from batchopt.optim import CG, LBFGS, SVRG, Iteration, LevenbergMarquardt, Result, SSBroyden, Status
from batchopt.optimizer import BatchOptimizer
from batchopt_workers.evaluate.program import Sample, Worker
from batchopt_workers.functions.simulation import finite_differences

__version__ = "0.3.0"

__all__ = [
    "CG",
    "LBFGS",
    "SVRG",
    "AllWorkersLostError",
    "BatchOptimizer",
    "Batches",
    "BatchoptError",
    "CheckpointError",
    "CompileError",
    "Covariance",
    "Diagnosis",
    "Evaluated",
    "Iteration",
    "LevenbergMarquardt",
    "NodeLostError",
    "NodesDifferError",
    "NonFiniteError",
    "Observer",
    "Penalty",
    "PoisonChunkError",
    "Result",
    "SSBroyden",
    "Sample",
    "Status",
    "Term",
    "Weighted",
    "Worker",
    "WorkerError",
    "WorkerLostError",
    "WorkerStartError",
    "finite_differences",
    "hogwild",
    "resample",
    "split_batch",
]
