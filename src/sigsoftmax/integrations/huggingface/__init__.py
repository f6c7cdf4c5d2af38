"""sigsoftmax in Hugging Face transformers: one line gives a language model another output function.

>>> from transformers import AutoModelForCausalLM, LlamaConfig
>>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
>>> model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=50, **sizes))
>>> model = apply_output_function(model, "sigsoftmax")
>>> model.output_function
HeadFunction(
  function='sigsoftmax'
  (function_parameters): ParameterDict()
)

See docs/huggingface.md.
"""

from sigsoftmax._version import install_extra

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"sigsoftmax.integrations.huggingface needs transformers 5.17.0 or newer: {install_extra('hf')}"
    ) from error
if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 17):
    raise ImportError(
        f"sigsoftmax.integrations.huggingface needs transformers 5.17.0 or newer, got {_transformers.__version__}: "
        f"{install_extra('hf')}"
    )

from sigsoftmax.integrations.huggingface.logits_processor import OutputFunctionLogitsProcessor
from sigsoftmax.integrations.huggingface.patching.apply import apply_output_function, remove_output_function
from sigsoftmax.integrations.huggingface.scoring import token_log_likelihoods
from sigsoftmax.integrations.huggingface.storage.loading import (
    SigsoftmaxConfig,
    SigsoftmaxForCausalLM,
    SigsoftmaxForMaskedLM,
    SigsoftmaxForSeq2SeqLM,
    SigsoftmaxForSpeechSeq2Seq,
    SigsoftmaxModel,
    from_pretrained,
    load_adapter,
)
from sigsoftmax.integrations.huggingface.trainers.retrofit import AnnealShift, retrofit, shifted_start, smallest_logit

__all__ = [
    "AnnealShift",
    "OutputFunctionLogitsProcessor",
    "SigsoftmaxConfig",
    "SigsoftmaxForCausalLM",
    "SigsoftmaxForMaskedLM",
    "SigsoftmaxForSeq2SeqLM",
    "SigsoftmaxForSpeechSeq2Seq",
    "SigsoftmaxModel",
    "apply_output_function",
    "from_pretrained",
    "load_adapter",
    "remove_output_function",
    "retrofit",
    "shifted_start",
    "smallest_logit",
    "token_log_likelihoods",
]
