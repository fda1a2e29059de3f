"""The backend of scripts started by torchrun, srun or mpirun, whose every rank runs the script."""
