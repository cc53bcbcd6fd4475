"""Who computes a step: native kernels, or a cost model and a clock."""
