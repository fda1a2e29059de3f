"""Who evaluates what, and how the partials are merged: decisions and sums, without input or output."""
