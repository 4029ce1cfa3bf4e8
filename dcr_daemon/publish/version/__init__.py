"""One version under construction: `Attempt`, which `group` opens and ends.

In: an `open` record and blocks of new values. Out: chunks and a part in the bucket (`uploads`), what an undo needs
(`spool`), the fate (`fate`), and what a caller of `publish` holds (`update`).
"""
