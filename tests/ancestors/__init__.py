"""What the systems that batchopt descends from let people do, tried against it: the rows of docs/ancestors.md."""
