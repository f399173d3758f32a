"""Datasets with sizes known ahead, packing collation and planned global batches."""
