"""The backend of scripts that torchrun, srun or mpirun starts: every rank runs the script."""
