"""Everything that parent and workers both know: layout, packing, memory, orders, failures."""
