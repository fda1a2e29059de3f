"""The distribution of chunks, and the merging of partials: decisions and sums, without input or output."""
