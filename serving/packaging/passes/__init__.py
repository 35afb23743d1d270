"""The passes over the traced graph, one file each; `registry` says which run, and in which order.

`linears` and `tensors` hold what several of them share.
"""
