"""Numbers stored small: round to nearest, GPTQ and AWQ, and the layouts they are written in."""
