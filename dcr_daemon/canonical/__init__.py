"""Canonical tensors: names, types and shapes; boxes and regions of their elements; sums over their bits.

In come names, shapes and strides, and bits as numpy arrays of unsigned integers; out go layouts, boxes, regions and
fingerprints. Every other package builds on this one. Pure and synchronous; numpy and numba only, and numba is imported
when a kernel is first called.

    layout, dtypes       the table of canonical tensors, with a digest
    box, region          strided pieces of a tensor: on the wire, and of a local tensor
    compose, fit         regions from other regions, and from lists of indices
    coverage             whether every element has exactly one source
    fingerprint          one 64-bit sum per tensor (kernels, jit: its compiled loops)
    gather               strided elements out of a source that reads consecutive ones
"""
