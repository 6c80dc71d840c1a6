"""wide's checkpoints in vLLM: `vllm serve CHECKPOINT`, where CHECKPOINT is a folder of `wide.save_checkpoint`.

vLLM finds `plugin.register` through the entry point `vllm.general_plugins`. Nothing else in wide imports this package.

    plugin      makes the checkpoints known: model types, model classes, what is refused at start
    limits      what a checkpoint's configuration asks of vLLM, and what is refused
    model       vLLM's dense classes, with modules exchanged after they have built themselves
    backend     other families and static checkpoints, by vLLM's Transformers backend
    sublayers   the modules that take their place: router, FFN, attention
    int8        weights in int8
    warming     what requests will run, once before
    tally       what was skipped, counted on the device and logged
    pages       attention over vLLM's pages
    operators   operators of torch that are opaque to vLLM's compiler: what runs depends on the number of rows
"""
