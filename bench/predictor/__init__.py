"""The QUARTZ paper's Table 6: predicted prefills under shifts."""
