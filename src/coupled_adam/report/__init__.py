"""Results of studies as tables, figures, a verdict and one page: reads result files, runs nothing."""
