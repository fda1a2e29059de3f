"""Types of NumPy arrays."""

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
