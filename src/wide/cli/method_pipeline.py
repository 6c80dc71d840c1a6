"""A run of any method of the benchmark: decide or train, compare on held-out text, LoRA, save, draw."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wide.cli.loading import require_lora
from wide.cli.options import PruneRequest
from wide.cli.pipeline import Pipeline
from wide.data.batches import TokenBlocks
from wide.methods.apply import apply, recover_row
from wide.methods.catalogue import Method, get
from wide.methods.method import Target
from wide.models.adapter import load, save

_COUNTED = {"nominal": "as the method counts it", "linear_flops": "of the linear FLOPs of the decoder layers"}


class MethodPipeline(Pipeline):
    """One run of `wide prune --method`."""

    def prune_by(self, asked: PruneRequest) -> None:
        """Let the method decide, add LoRA if asked, each compared with the dense model.

        Raises:
            WideError: Whatever the method refuses.
        """
        method = get(asked.method)
        target = Target(sparsity=asked.objective.sparsity, match=asked.match)
        if asked.recover is not None:
            require_lora()
        if method.trains:
            self._check_batches(asked.stage)
        model = self._load_model()
        blocks = self._load_texts(model, asked.stage)
        later = None if asked.recover is None else self._blocks(asked.recover)
        stage = replace(asked.stage, compile=False)
        self._rehearse(model, lambda: _apply(model, method, blocks, target, replace(asked, stage=stage)))
        self._begin(model, f"{method.name}, {target.sparsity:.0%} {_COUNTED[target.match]}", target.sparsity)
        self._measure(model, "dense")
        doing = "training" if method.trains else "deciding"
        self._train(model, "pruned", lambda: self._decide(model, method, blocks, target, asked), doing=doing)
        if asked.recover is not None:
            recipe, text = asked.recover, later
            assert text is not None
            folder = self._folder.path / "stage2"
            resume = self._folder.resume
            self._train(
                model,
                "pruned + LoRA",
                lambda: recover_row(model, text, recipe, output=folder, resume=resume, seed=recipe.seed),
            )
        self._finish()

    def _decide(self, model: Any, method: Method, blocks: TokenBlocks, target: Target, asked: PruneRequest) -> None:
        if self._folder.resume and self._folder.adapter.is_dir():
            load(model, self._folder.adapter)
            return
        _apply(model, method, blocks, target, asked, output=self._folder.path / "stage1", resume=self._folder.resume)
        # At once: what took hours to decide must not wait for the evaluation.
        save(model, self._folder.adapter)


def _apply(
    model: Any,
    method: Method,
    blocks: TokenBlocks,
    target: Target,
    asked: PruneRequest,
    *,
    output: Path | None = None,
    resume: bool = False,
) -> None:
    apply(
        model,
        method,
        blocks,
        target,
        asked.settings,
        stage=asked.stage,
        objective=asked.objective,
        output=output,
        resume=resume,
        seed=asked.stage.seed,
    )
