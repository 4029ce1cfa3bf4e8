"""What is handed over by a trainer: tensors in host or device memory, and whether they fit the layout.

In: a module, a mapping or a stream of pairs (`tensors`), or the headers of files. Out: sources (`sources`), which give
any slice of a tensor in the canonical dtype (`cast`), once `validator` has found that they are the layout's tensors.
`publish.group.update_inputs` and the watcher call it.
"""
