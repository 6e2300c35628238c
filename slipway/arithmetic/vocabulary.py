"""GPT-2's vocabulary, and remedies if it is missing."""

from __future__ import annotations

END_OF_TEXT = "<|endoftext|>"
# Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners"), section 2.3: 50,257 tokens, of
# which the last one ends a text.
GPT2_SIZE = 50257
GPT2_END_OF_TEXT = GPT2_SIZE - 1

WAYS_TO_A_VOCABULARY = (
    "`slipway data tokenize` trains vocab.json and merges.txt on your own text: vocab_size tokens, to which "
    "published weights do not fit\n"
    "or let it fetch GPT-2's (data_preparation.tokenizer.vocab_url and merges_url): "
    f"{GPT2_SIZE:,} tokens, to which GPT-2's published weights fit\n"
    "their ids differ: tokenize the text with the same two files that the training names"
)
