"""Training loops: `fit` runs a complete training in one call, with validation, logs, checkpoints and exact resuming."""

from batchopt.training.checkpoint import Checkpoint as Checkpoint
from batchopt.training.fit import fit as fit
from batchopt.training.logs import log_steps as log_steps
from batchopt.training.moments import Moment as Moment
from batchopt.training.moments import State as State
from batchopt.training.monitor import Monitor as Monitor
from batchopt.training.record import Record as Record
from batchopt.training.triggers import EarlyStopping as EarlyStopping
from batchopt.training.triggers import EveryEpoch as EveryEpoch
from batchopt.training.triggers import EverySeconds as EverySeconds
