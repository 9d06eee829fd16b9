"""The parts of `first_gpu_run.sh`."""
