"""Jagged (variable-length) features: JaggedTensor, KeyedJaggedTensor, KeyedTensor."""
