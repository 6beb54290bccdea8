"""Traffic signs: what a data set yields, one file a format, classes and augmentation."""
