"""How many hosts a load needs: costs that were measured, and a simulation of the servers' batching."""
