"""Commands of the project, of which `check` has decisions that are tested."""
