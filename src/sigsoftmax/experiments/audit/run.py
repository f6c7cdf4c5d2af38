"""The audit: what an output layer is, what it can and cannot do, and, against a target, what it costs in nats.

Shapes: N contexts, V words.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

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
from sigsoftmax.analysis.output_layer import Contexts
from sigsoftmax.experiments.audit.audited_models import (
    Source,
    kind_of,
    open_arrays,
    open_matrix,
    read_text,
    sample_rows,
)
from sigsoftmax.experiments.audit.checkpoints import open_checkpoint
from sigsoftmax.experiments.audit.config import AuditConfig
from sigsoftmax.experiments.audit.huggingface import HuggingFaceModel, open_head_only, open_model
from sigsoftmax.experiments.distribution_sources import (
    StoredDistributions,
    is_file_of_distributions,
    open_distributions,
)
from sigsoftmax.records import Record, store
from sigsoftmax.records.durations import duration_text
from sigsoftmax.records.schemas.audits import Audit, TargetResult
from sigsoftmax.records.schemas.capacity import CapacityResult
from sigsoftmax.report.audits import audit_text, meaning

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
    except KeyboardInterrupt:
        progress("")
        if auditor.source is None:
            raise
        auditor.finish(stopped_by="Interrupted")
        raise
    except ValueError as error:
        progress("")
        if auditor.is_measured:
            auditor.finish(stopped_by=f"Stopped by an error ({error})")
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
    source: Source | None = None
    model: HuggingFaceModel | None = None
    findings: Findings = field(default_factory=Findings)
    contexts: int = 0
    contexts_from: str = ""
    target: TargetResult | None = None
    fits: list[CapacityResult] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether there is something to keep: all parts that need no target are done."""
        return self.contexts > 0 and not self.findings.pending

    def measure_all(self) -> None:
        config = self.config
        source = self.source = self._opened()
        self.findings.notes += source.notes
        settings = config.settings()
        # A target that cannot be read is told before the long part, as far as it shows.
        if config.target is not None and is_file_of_distributions(config.target):
            StoredDistributions(Path(config.target))
        elif config.target is not None:
            open_distributions(config.target)
        if config.bounds_only:
            self._announce(source, 0)
            measure(self._subject_of_bounds(source), settings, self.findings, self.progress)
            return
        count = self._contexts_to_take(source)
        self._announce(source, count)
        if self._has_target:
            self.unfinished.append("the comparison with the target")
        subject = self._subject(source, count)
        measure(subject, settings, self.findings, self.progress)
        if self._has_target:
            self._against_target(subject)
            self.unfinished.remove("the comparison with the target")

    # --- opening ----------------------------------------------------------------------------------------------

    def _opened(self) -> Source:
        config = self.config
        kind = kind_of(config.model)
        if config.teacher is not None and kind != "huggingface":
            raise ValueError(f"--teacher is for Hugging Face models, and {config.model} is none; --target names a file")
        if config.text is not None and kind in ("matrix", "arrays"):
            raise ValueError(f"--text is for models that can be run; {config.model} brings its own contexts")
        if kind == "matrix":
            if config.function is not None:
                raise ValueError("--function says what turns logits into probabilities; a matrix of these needs none")
            return open_matrix(config.model, seed=config.seed)
        if kind == "arrays":
            return open_arrays(config.model, function=config.function, memory=config.memory, seed=config.seed)
        if kind == "checkpoint":
            if config.function is not None:
                raise ValueError("--function is not for checkpoints: they know their output function")
            return open_checkpoint(config.model, text=config.text, device=config.device)
        if config.bounds_only:
            return open_head_only(config.model, function=config.function, trust_remote_code=config.trust_remote_code)
        self.model = open_model(
            config.model,
            memory=config.memory,
            function=config.function,
            device=config.device,
            trust_remote_code=config.trust_remote_code,
            progress=self.progress,
        )
        text = None if config.text is None else read_text(config.text)
        return self.model.source(text, window=config.window, seed=config.seed, text_name=f"the text {config.text}")

    def _contexts_to_take(self, source: Source) -> int:
        wanted = self.config.contexts
        if wanted is None:
            needed = DEFAULT_CONTEXTS if source.layer is None else 2 * (source.layer.width + 2)
            wanted = min(max(needed, 256), DEFAULT_CONTEXTS)
        if source.available is not None:
            wanted = min(wanted, source.available)
        return contexts_within(self.config.memory, source.words, source.layer, wanted=wanted)

    def _announce(self, source: Source, count: int) -> None:
        layer = source.layer
        settings = self.config.settings()
        steps = audit_steps(
            measure_machine(self.config.device),
            contexts=count,
            words=source.words,
            width=None if layer is None else layer.width,
            components=1 if layer is None else layer.components,
            is_softmax=layer is not None and layer.is_softmax,
            sampled=settings.sampled_contexts,
            operations_per_context=source.operations_per_context,
            truncated=len(truncation_widths(count, source.words)) if count else 0,
            argmax_words=settings.argmax_words,
            argmax_seconds=settings.argmax_seconds,
            bounds_contexts=(source.available or 0) if self.config.bounds_only and source.contexts else 0,
        )
        shape = f"{source.words:,} words" + ("" if layer is None else f", width {layer.width:,}")
        shape += f", {count:,} contexts" if count else ", the output layer alone"
        fits = ", and the fits against the target, whose time is told when they begin" if self._has_target else ""
        self.progress("")
        self.say(f"Auditing {source.name}: {shape}. This takes {listed(steps)} on this machine{fits}.")

    @property
    def _has_target(self) -> bool:
        has_truth = self.source is not None and self.source.truth is not None
        return has_truth or bool(self.config.teacher or self.config.target)

    # --- measuring --------------------------------------------------------------------------------------------

    def _subject(self, source: Source, count: int) -> Subject:
        if source.log_probs is not None:
            log_p_NV = source.log_probs(count, self.progress)
            self.contexts = len(log_p_NV)
            self.contexts_from = "the rows of the file" + (
                f", {len(log_p_NV):,} of {source.available:,} drawn at random"
                if len(log_p_NV) != source.available
                else ""
            )
            precision = None if source.precision is None else source.precision()
            return Subject(name=source.name, layer=None, contexts=None, log_p_NV=log_p_NV, precision=precision)
        assert source.contexts is not None and source.layer is not None
        contexts = source.contexts(count, self.progress)
        if self.model is not None:
            # Of the model only the output layer is needed from here on.
            self.model.model = None
        self.contexts, self.contexts_from = len(contexts), contexts.description
        if len(contexts) < count:
            self.findings.notes.append(f"The text has {len(contexts):,} contexts, fewer than the {count:,} asked for.")
        log_p_NV = log_probs_of(source.layer, contexts, memory=self.config.memory, progress=self.progress)
        return Subject(
            name=source.name,
            layer=source.layer,
            contexts=contexts,
            log_p_NV=log_p_NV,
            more_contexts=self._more_contexts(source, len(contexts)),
        )

    def _more_contexts(self, source: Source, taken: int) -> Contexts | None:
        """Where the memory holds log P of fewer contexts than the bounds need, and there are more at hand."""
        assert source.contexts is not None and source.layer is not None
        needed = contexts_for_bounds(source.layer.width)
        if source.available is None or self.config.contexts is not None or not taken < needed <= source.available:
            return None
        return source.contexts(needed, self.progress)

    def _subject_of_bounds(self, source: Source) -> Subject:
        if source.layer is None:
            raise ValueError(
                f"--bounds-only needs an output layer, and {source.name} is a matrix of log-probabilities; without "
                "the option its spectrum is computed, which says more"
            )
        contexts = None
        if source.contexts is not None and source.available is not None:
            contexts = source.contexts(source.available, self.progress)
            self.contexts, self.contexts_from = len(contexts), contexts.description
        return Subject(name=source.name, layer=source.layer, contexts=contexts, log_p_NV=None)

    # --- against a target -------------------------------------------------------------------------------------

    def _against_target(self, subject: Subject) -> None:
        config, began = self.config, time.perf_counter()
        log_p_NV, name = self._target()
        # Fits run on the CPU, in processes of their own.
        log_p_NV = log_p_NV.cpu()
        comparable = subject.log_p_NV is not None and log_p_NV.shape == subject.log_p_NV.shape
        is_language = config.target is not None and not is_file_of_distributions(config.target)
        model_kl = None
        if comparable and not is_language:
            assert subject.log_p_NV is not None
            model_kl = mean_kl(log_p_NV, subject.log_p_NV.cpu())
        chosen = restricted(
            log_p_NV, contexts=config.fit_contexts, words=config.fit_words, seed=config.seed, description=name
        )
        contexts, words = chosen.distributions.log_p_NM.shape
        width = None if subject.layer is None else subject.layer.width
        widths = config.widths or widths_that_bind(width, contexts, words)
        if width is not None and not config.widths and width not in widths:
            self.findings.notes.append(
                f"At the layer's width {width:,} a softmax makes any distributions over {words:,} words in "
                f"{contexts:,} contexts, so smaller widths were fitted; --fit-contexts and --fit-words above "
                f"{2 * width:,} measure it."
            )
        heads = tuple(dict.fromkeys([*config.heads, *([] if subject.layer is None else [subject.layer.head_text])]))
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
            f"contexts, {words:,} words): about {duration_text(fit_seconds(chosen.distributions, effort))}."
        )

        def fitted(result: CapacityResult, done: int, total: int) -> None:
            self.fits.append(result)
            self.progress(f"fitted {done} of {total}: {result.head}, d = {result.width}")

        try:
            results = least_kl(chosen.distributions, heads, widths, effort, progress=fitted)
        finally:
            # Fits that are finished are valid alone; without softmax at their width they cannot be compared.
            done = {(r.head, r.width) for r in self.fits}
            if any(head == "softmax" for head, _ in done):
                self.target = TargetResult(
                    target=name,
                    contexts=contexts,
                    words=words,
                    all_words=log_p_NV.shape[1],
                    mass=chosen.mass,
                    is_lower_bound=words < log_p_NV.shape[1],
                    model_kl=model_kl,
                    heads=heads_at_width(self.fits),
                    seconds=time.perf_counter() - began,
                )
        self.fits = results
        assert self.target is not None
        self.target = dataclasses.replace(self.target, heads=heads_at_width(results))

    def _target(self) -> tuple[Tensor, str]:
        config = self.config
        if config.teacher is not None:
            return self._teacher_log_probs(config.teacher), f"the teacher {config.teacher}"
        if config.target is None:
            assert self.source is not None and self.source.truth is not None
            return self.source.truth(self.contexts), "the language that the text was drawn from"
        if is_file_of_distributions(config.target):
            stored = StoredDistributions(Path(config.target))
            possible = contexts_within(config.memory, stored.words, None, wanted=stored.contexts)
            count = min(possible, self.contexts) if self._same_rows(stored.contexts) else possible
            rows_N = sample_rows(stored.contexts, count, config.seed)
            return stored.log_probs(rows_N, self.progress), f"the distributions of {stored.path.name}"
        target = open_distributions(config.target)
        return target.log_p_NM, f"a language ({target.description})"

    def _same_rows(self, contexts: int) -> bool:
        return self.source is not None and self.source.available == contexts

    def _teacher_log_probs(self, name: str) -> Tensor:
        assert self.model is not None and self.model.shown is not None
        teacher = open_model(
            name,
            memory=self.config.memory,
            device=self.config.device,
            trust_remote_code=self.config.trust_remote_code,
            progress=self.progress,
        )
        if teacher.layer.words != self.model.layer.words:
            raise ValueError(
                f"the teacher {name} has {teacher.layer.words:,} words and {self.config.model} has "
                f"{self.model.layer.words:,}; a teacher must speak the same tokens"
            )
        ours, theirs = self.model.tokenizer, teacher.tokenizer
        if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            raise ValueError(
                f"the tokenizers of {name} and {self.config.model} give tokens other numbers; choose another"
            )
        contexts = teacher.contexts(self.model.shown, self.contexts, self.progress)
        teacher.model = None
        return log_probs_of(teacher.layer, contexts, memory=self.config.memory, progress=self.progress)

    # --- the end ----------------------------------------------------------------------------------------------

    def finish(self, *, stopped_by: str | None = None) -> Audit:
        assert self.source is not None
        pending = [*self.findings.pending, *self.unfinished]
        notes = list(self.findings.notes)
        was_interrupted = stopped_by is not None
        if was_interrupted:
            notes.append(f"{stopped_by}; not finished: {', '.join(pending) or 'nothing else'}.")
        found = self.findings
        audit = Audit(
            source=self.source.name,
            layer=self.source.described_layer(),
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
            was_interrupted=was_interrupted,
            seed=self.config.seed,
            memory=self.config.memory,
            seconds=time.perf_counter() - self.began,
        )
        audit = dataclasses.replace(audit, meaning=tuple(meaning(audit)))
        path = self._written(audit)
        self.say(audit_text(audit))
        took = f"{'Stopped after' if was_interrupted else 'Done in'} {duration_text(audit.seconds)}"
        self.say(f"{took}. Written:\n  {path}")
        return audit

    def _written(self, audit: Audit) -> Path:
        """The file of the records. Earlier ones stay there, but for those of audits that found no more than this."""
        store(self.config.records, [Record.of(audit), *map(Record.of, self.fits)])
        return self.config.records
