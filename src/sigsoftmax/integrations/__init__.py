"""Output functions inside other libraries: ``huggingface`` for transformers, ``onnx`` for exported models.

Each needs packages that the core does not; the extras ``hf`` and ``onnx`` bring them.
"""
