"""The audit of an output layer: its properties, its limits, and, against a target, its cost in nats.

Shapes: N contexts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sigsoftmax._version import install_extra
from sigsoftmax.analysis.audit.effort import audit_steps, fit_seconds, listed, measure_machine
from sigsoftmax.analysis.audit.findings import (
    Findings,
    Subject,
    contexts_for_bounds,
    contexts_within,
    log_probs_of,
    measure,
)
from sigsoftmax.analysis.audit.truncation import truncation_widths
from sigsoftmax.analysis.capacity.curves import CapacityConfig
from sigsoftmax.analysis.capacity.lbfgs import Budget
from sigsoftmax.analysis.capacity.width_cost import heads_at_width, least_kl, mean_kl, restricted, widths_that_bind
from sigsoftmax.analysis.head_weights import sample_rows
from sigsoftmax.experiments.audit.audited_models import (
    AuditedModel,
    kind_of,
    open_arrays,
    open_matrix,
    read_text,
)
from sigsoftmax.experiments.audit.checkpoints import open_checkpoint
from sigsoftmax.experiments.audit.config import AuditConfig
from sigsoftmax.experiments.distribution_sources import (
    StoredDistributions,
    is_file_of_distributions,
    open_distributions,
)
from sigsoftmax.experiments.fitted_heads import fitted_heads
from sigsoftmax.records import Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.audits import Audit, TargetResult
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.findings.audit_meaning import meaning
from sigsoftmax.report.findings.audits import audit_text

if TYPE_CHECKING:
    from sigsoftmax.experiments.audit.huggingface import HuggingFaceModel

__all__ = ["AuditConfig", "run"]

Say = Callable[[str], None]

DEFAULT_CONTEXTS = 2048


def run(config: AuditConfig, say: Say, progress: Say = lambda _: None) -> Audit:
    """Open, estimate, measure, say and record.

    An interrupt, or a target that turns out to be wrong, writes what is valid so far, says it, and goes on up.
    """
    auditor = _Auditor(config, say, progress)
    try:
        auditor.measure_all()
    except (KeyboardInterrupt, ValueError) as error:
        progress("")
        if isinstance(error, ValueError) and auditor.is_measured:
            auditor.finish(stopped_by=f"Stopped by an error ({error})")
        if isinstance(error, KeyboardInterrupt) and auditor.model is not None:
            auditor.finish(stopped_by="Interrupted")
        raise
    progress("")
    return auditor.finish()


@dataclass
class _Auditor:
    """The state of one audit."""

    config: AuditConfig
    say: Say
    progress: Say
    began: float = field(default_factory=time.perf_counter)
    model: AuditedModel | None = None
    loaded: HuggingFaceModel | None = None
    """the Hugging Face model behind ``model``, if it is one"""
    findings: Findings = field(default_factory=Findings)
    contexts: int = 0
    contexts_from: str = ""
    target: TargetResult | None = None
    fits: list[CapacityResult] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """True once there is something to keep: all parts that need no target are done."""
        is_begun = self.contexts > 0 or self.findings.bounds is not None
        return is_begun and not self.findings.pending

    def measure_all(self) -> None:
        config = self.config
        model = self.model = self._opened()
        self.findings.notes += model.notes
        settings = config.settings()
        # A target that cannot be read is told before the long part, as far as it shows.
        if config.target is not None and is_file_of_distributions(config.target):
            StoredDistributions(Path(config.target))
        elif config.target is not None:
            open_distributions(config.target)
        is_layer_alone = config.bounds_only or (model.layer is not None and model.contexts is None)
        count = 0 if is_layer_alone else self._contexts_to_take(model)
        self._announce(model, count)
        if self._has_target:
            self.unfinished.append("the comparison with the target")
        if is_layer_alone:
            subject = self._subject_of_bounds(model)
        else:
            subject = self._subject_of_matrix(model, count) if model.layer is None else self._subject(model, count)
        measure(subject, settings, self.findings, self.progress)
        if self._has_target:
            self._against_target(subject)
            self.unfinished.clear()

    # --- opening ----------------------------------------------------------------------------------------------

    def _opened(self) -> AuditedModel:
        config = self.config
        kind = kind_of(config.model)
        if config.teacher is not None and kind != "huggingface":
            raise ValueError(f"--teacher is for Hugging Face models, and {config.model} is none; --target names a file")
        if config.text is not None and kind in ("matrix", "arrays"):
            raise ValueError(f"--text is for models that can be run; {config.model} brings its own contexts")
        if config.data is not None and kind != "checkpoint":
            raise ValueError(f"--data is for checkpoints of runs, and {config.model} is none; --text names a text")
        if kind == "matrix":
            if config.function is not None:
                raise ValueError("--function says what turns logits into probabilities; a matrix of these needs none")
            return open_matrix(config.model)
        if kind == "arrays":
            return open_arrays(config.model, function=config.function, memory=config.memory, seed=config.seed)
        if kind == "checkpoint":
            if config.function is not None:
                raise ValueError("--function is not for checkpoints: they know their output function")
            return open_checkpoint(
                config.model,
                text=config.text,
                data=config.data,
                layer_alone=config.bounds_only,
                device=config.device,
            )
        huggingface = _huggingface(config.model)
        if config.bounds_only:
            return huggingface.open_head_only(
                config.model,
                function=config.function,
                trust_remote_code=config.trust_remote_code,
                seed=config.seed,
            )
        self.loaded = self._loaded(config.model, function=config.function)
        text = None if config.text is None else read_text(config.text)
        return self.loaded.with_text(text, window=config.window, seed=config.seed, text_name=f"the text {config.text}")

    def _loaded(self, name: str, *, function: str | None = None) -> HuggingFaceModel:
        return _huggingface(name).open_model(
            name,
            memory=self.config.memory,
            function=function,
            device=self.config.device,
            trust_remote_code=self.config.trust_remote_code,
            progress=self.progress,
        )

    def _contexts_to_take(self, model: AuditedModel) -> int:
        wanted = self.config.contexts
        if wanted is None:
            needed = DEFAULT_CONTEXTS if model.layer is None else 2 * (model.layer.width + 2)
            wanted = min(max(needed, 256), DEFAULT_CONTEXTS)
        if model.available is not None:
            wanted = min(wanted, model.available)
        return contexts_within(self.config.memory, model.vocabulary, model.layer, wanted=wanted)

    def _announce(self, model: AuditedModel, count: int) -> None:
        layer = model.layer
        settings = self.config.settings()
        steps = audit_steps(
            measure_machine(self.config.device),
            contexts=count,
            vocabulary=model.vocabulary,
            width=None if layer is None else layer.width,
            components=1 if layer is None else layer.components,
            is_softmax=layer is not None and layer.is_softmax,
            sampled=settings.sampled_contexts,
            operations_per_context=model.operations_per_context,
            truncated=len(truncation_widths(count, model.vocabulary)) if count else 0,
            argmax_tokens=0 if settings.bounds_only else settings.argmax_tokens,
            argmax_seconds=settings.argmax_seconds,
            bounds_contexts=(model.available or 0) if self.config.bounds_only and model.contexts else 0,
        )
        shape = f"{model.vocabulary:,} tokens" + ("" if layer is None else f", width {layer.width:,}")
        shape += f", {count:,} contexts" if count else ", the output layer alone"
        fits = ", and the fits against the target, whose time is told when they begin" if self._has_target else ""
        self.progress("")
        self.say(f"Auditing {model.name}: {shape}. This takes {listed(steps)} on this machine{fits}.")

    @property
    def _has_target(self) -> bool:
        has_truth = self.model is not None and self.model.truth is not None
        return has_truth or bool(self.config.teacher or self.config.target)

    # --- measuring --------------------------------------------------------------------------------------------

    def _rows_of(self, stored: StoredDistributions, count: int) -> Tensor:
        return stored.log_probs(sample_rows(stored.contexts, count, self.config.seed), self.progress)

    def _subject_of_matrix(self, model: AuditedModel, count: int) -> Subject:
        assert model.matrix is not None
        log_p_NV = self._rows_of(model.matrix, count)
        drawn = "" if count == model.available else f", {count:,} of {model.available:,} drawn at random"
        self.contexts, self.contexts_from = count, f"the rows of the file{drawn}"
        return Subject(name=model.name, layer=None, contexts=None, log_p_NV=log_p_NV, precision=model.matrix.precision)

    def _subject(self, model: AuditedModel, count: int) -> Subject:
        assert model.contexts is not None and model.layer is not None
        contexts = model.contexts(count, self.progress)
        if self.loaded is not None:
            # Of the model only the output layer is needed from here on.
            self.loaded.model = None
        self.contexts, self.contexts_from = len(contexts), contexts.description
        if len(contexts) < count:
            self.findings.notes.append(f"The text has {len(contexts):,} contexts, fewer than the {count:,} asked for.")
        log_p_NV = log_probs_of(model.layer, contexts, memory=self.config.memory, progress=self.progress)
        # The memory may hold log P of fewer contexts than the bounds need, while there are more at hand.
        needed, more = contexts_for_bounds(model.layer.width), None
        if self.config.contexts is None and model.available is not None and len(contexts) < needed <= model.available:
            more = model.contexts(needed, self.progress)
        return Subject(name=model.name, layer=model.layer, contexts=contexts, log_p_NV=log_p_NV, more_contexts=more)

    def _subject_of_bounds(self, model: AuditedModel) -> Subject:
        if model.layer is None:
            raise ValueError(
                f"--bounds-only needs an output layer, and {model.name} is a matrix of log-probabilities; without "
                "the option its spectrum is computed, which says more"
            )
        contexts = None
        if model.contexts is not None and model.available is not None:
            contexts = model.contexts(model.available, self.progress)
            self.contexts, self.contexts_from = len(contexts), contexts.description
        return Subject(name=model.name, layer=model.layer, contexts=contexts, log_p_NV=None)

    # --- against a target -------------------------------------------------------------------------------------

    def _against_target(self, subject: Subject) -> None:
        config, began = self.config, time.perf_counter()
        log_p_NV, name = self._target()
        # Fits run on the CPU, in processes of their own.
        log_p_NV = log_p_NV.cpu()
        is_language = config.target is not None and not is_file_of_distributions(config.target)
        model_kl = None
        if not is_language and subject.log_p_NV is not None and log_p_NV.shape == subject.log_p_NV.shape:
            model_kl = mean_kl(log_p_NV, subject.log_p_NV.cpu())
        chosen = restricted(
            log_p_NV, contexts=config.fit_contexts, vocabulary=config.fit_words, seed=config.seed, description=name
        )
        contexts, vocabulary = chosen.log_p_NV.shape
        width = None if subject.layer is None else subject.layer.width
        widths = config.widths or widths_that_bind(width, contexts, vocabulary)
        if width is not None and not config.widths and width not in widths:
            self.findings.notes.append(
                f"At the layer's width {width:,} a softmax makes any distributions over {vocabulary:,} tokens in "
                f"{contexts:,} contexts, so smaller widths were fitted; --fit-contexts and --fit-words above "
                f"{2 * width:,} measure it."
            )
        own = [] if subject.layer is None else [subject.layer.head_text]
        heads = tuple(dict.fromkeys([*fitted_heads(config.heads), *own]))
        effort = CapacityConfig(
            heads=heads,
            widths=widths,
            random_starts=0,
            least_starts=config.starts,
            budget=Budget(iterations=config.iterations, floor=1e-6),
            workers=config.workers,
            seed=config.seed,
        )
        self.progress("")
        self.say(
            f"Fitting {len(heads)} output functions at width {', '.join(map(str, widths))} to {name} ({contexts:,} "
            f"contexts, {vocabulary:,} tokens): about {duration_text(fit_seconds(chosen, effort))}."
        )

        def fitted(result: CapacityResult, done: int, total: int) -> None:
            self.fits.append(result)
            self.progress(f"fitted {done} of {total}: {result.head}, d = {result.width}")

        try:
            self.fits = least_kl(chosen, heads, widths, effort, progress=fitted)
        finally:
            # Fits that are finished are valid alone; without softmax at their width they cannot be compared.
            if any(fit.head == "softmax" for fit in self.fits):
                self.target = TargetResult(
                    target=name,
                    contexts=contexts,
                    words=vocabulary,
                    all_words=log_p_NV.shape[1],
                    mass=float(chosen.weights_N.sum()),
                    is_lower_bound=vocabulary < log_p_NV.shape[1],
                    model_kl=model_kl,
                    heads=heads_at_width(self.fits),
                    seconds=time.perf_counter() - began,
                )

    def _target(self) -> tuple[Tensor, str]:
        config, model = self.config, self.model
        assert model is not None
        if config.teacher is not None:
            return self._teacher_log_probs(config.teacher), f"the teacher {config.teacher}"
        if config.target is None:
            assert model.truth is not None
            return model.truth(self.contexts), "the language that the text was drawn from"
        if not is_file_of_distributions(config.target):
            target = open_distributions(config.target)
            return target.log_p_NV, f"a language ({target.description})"
        stored = StoredDistributions(Path(config.target))
        count = contexts_within(config.memory, stored.vocabulary, None, wanted=stored.contexts)
        if model.available == stored.contexts:
            count = min(count, self.contexts)
        return self._rows_of(stored, count), f"the distributions of {stored.path.name}"

    def _teacher_log_probs(self, name: str) -> Tensor:
        assert self.loaded is not None and self.loaded.shown is not None
        teacher = self._loaded(name)
        ours, theirs, layer = self.loaded.tokenizer, teacher.tokenizer, teacher.known.layer
        assert layer is not None
        if layer.vocabulary != self.loaded.vocabulary:
            raise ValueError(
                f"the teacher {name} has {layer.vocabulary:,} tokens and {self.config.model} has "
                f"{self.loaded.vocabulary:,}; a teacher must speak the same tokens"
            )
        if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            raise ValueError(
                f"the tokenizers of {name} and {self.config.model} give tokens other numbers; choose another"
            )
        contexts = teacher.contexts(self.loaded.shown, self.contexts, self.progress)
        teacher.model = None
        return log_probs_of(layer, contexts, memory=self.config.memory, progress=self.progress)

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self, *, stopped_by: str | None = None) -> Audit:
        """Record and say what was found."""
        assert self.model is not None
        found, notes = self.findings, list(self.findings.notes)
        if stopped_by is not None:
            pending = [*found.pending, *self.unfinished]
            notes.append(f"{stopped_by}; not finished: {', '.join(pending) or 'nothing else'}.")
        audit = Audit(
            source=self.model.name,
            layer=self.model.described_layer(),
            contexts=self.contexts,
            contexts_from=self.contexts_from,
            bounds=found.bounds,
            spectrum=found.spectrum,
            truncation=found.truncation,
            bend=found.bend,
            gradient=found.gradient,
            argmax=found.argmax,
            target=self.target,
            notes=tuple(notes),
            was_interrupted=stopped_by is not None,
            seed=self.config.seed,
            memory=self.config.memory,
            seconds=time.perf_counter() - self.began,
        )
        audit = dataclasses.replace(audit, meaning=tuple(meaning(audit)))
        # Earlier records stay in the file, but for those of audits that found no more than this.
        store(self.config.records, [Record.of(audit), *map(Record.of, self.fits)])
        self.say(audit_text(audit))
        took = f"{'Stopped after' if audit.was_interrupted else 'Done in'} {duration_text(audit.seconds)}"
        self.say(f"{took}. Written:\n  {self.config.records}")
        return audit


def _huggingface(name: str) -> Any:
    """The module that opens Hugging Face models; it needs transformers, which an audit of files does without."""
    try:
        from sigsoftmax.experiments.audit import huggingface
    except ImportError:
        raise ValueError(f"auditing the Hugging Face model {name} needs transformers: {install_extra('hf')}") from None
    return huggingface
