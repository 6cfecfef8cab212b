"""The language model of every family, on Megatron-core: layers, packed attention, log-probabilities.

`decoder.py` builds megatron's GPT model, `config.py` its configuration from Hugging Face's, `core_attention.py` the
attention inside packed sequences (also under context parallelism), and `logprob.py` computes log-probabilities and
entropies of labelled tokens without the full logits. `value_head.py` is the head of a critic.

May import: compat, layout, sequence.
"""
