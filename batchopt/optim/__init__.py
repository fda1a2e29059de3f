"""Optimizers for exact functions: of a full batch, with the same value at each evaluation."""

from batchopt.optim.cg import CG
from batchopt.optim.lbfgs import LBFGS
from batchopt.optim.levenberg_marquardt import LevenbergMarquardt
from batchopt.optim.minimizer import Iteration, Result, Status
from batchopt.optim.ssbroyden import SSBroyden
from batchopt.optim.svrg import SVRG

__all__ = ["CG", "LBFGS", "SVRG", "Iteration", "LevenbergMarquardt", "Result", "SSBroyden", "Status"]
