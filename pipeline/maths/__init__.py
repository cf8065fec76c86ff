"""Pure functions: tensors and floats in, (loss, metrics) out. No model, no configuration object, no logger.

Dimensions: B sequences, T positions, N trained positions, V vocabulary, D width, P prompts, G group size.
Every `[B, T]` tensor is aligned to `labels`; masks are bool and True means "in the loss". What stands at a
masked position, NaN and infinity included, has no influence on values or gradients.

A loss is a sum divided by a count for the whole optimizer step, so the losses of its micro-batches add up.
Metrics are sums beside their `count`; `metrics.combine` gives the means over the whole step.
"""
