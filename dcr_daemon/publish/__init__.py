"""From a trainer's weights to a sealed version.

In: a module, tensors or shards (`publisher`), or checkpoint files (`watch`), judged against the layout by `inputs`.
Out: chunks, parts, seals and anchors in the bucket. `group` says when a version begins and ends, alone or with other
ranks; `version` makes one; `baseline` holds the values that it is diffed against. `dcr publish` and training scripts
call it.
"""
