"""Who computes a step: native kernels, or a cost model and a clock; and what the machine can do."""
