"""The training side: samples in, optimizer updates out, on Megatron-core."""
