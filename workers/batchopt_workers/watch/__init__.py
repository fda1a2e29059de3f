"""The user's objects, as the parent sees them change."""
