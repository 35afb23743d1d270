"""From a trained model to one that answers: quantized, sharded, ready to be traced."""
