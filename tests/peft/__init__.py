"""Adapters of PEFT over a frozen base that is sharded, bf16 or 4-bit."""
