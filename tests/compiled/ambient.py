"""Something that losses may depend on, and that belongs to no program: workers import this module, too."""

FACTOR = 1.0
