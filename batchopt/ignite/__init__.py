"""Training loops on pytorch-ignite: its engine, events and handlers around `opt.step`; `pip install batchopt[ignite]`.
`fit` runs a complete training in one call, with validation, logging, checkpoints and exact resuming. `create_trainer`
and `create_evaluator` provide the engines alone."""

import warnings as _warnings

try:
    with _warnings.catch_warnings():
        _warnings.simplefilter("ignore", DeprecationWarning)  # of torch, for ignite's imports from it
        import ignite.engine as _engine  # noqa: F401
except ImportError as error:
    raise ImportError("batchopt.ignite needs pytorch-ignite: pip install batchopt[ignite]") from error

from batchopt.ignite.checkpoint import Checkpoint as Checkpoint
from batchopt.ignite.evaluator import create_evaluator as create_evaluator
from batchopt.ignite.events import Evaluation as Evaluation
from batchopt.ignite.events import StepEvents as StepEvents
from batchopt.ignite.events import guarded as guarded
from batchopt.ignite.fit import Moment as Moment
from batchopt.ignite.fit import fit as fit
from batchopt.ignite.logs import log_steps as log_steps
from batchopt.ignite.monitor import Monitor as Monitor
from batchopt.ignite.record import Record as Record
from batchopt.ignite.trainer import create_trainer as create_trainer
from batchopt.ignite.triggers import Best as Best
from batchopt.ignite.triggers import EarlyStopping as EarlyStopping
from batchopt.ignite.triggers import EveryEpoch as EveryEpoch
from batchopt.ignite.triggers import EverySeconds as EverySeconds
