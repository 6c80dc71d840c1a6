"""Run what routers leave, and nothing else: operators, the decoder they make up, CUDA graphs, `generate`."""
