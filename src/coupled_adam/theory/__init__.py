"""The paper's theory (Sec. theory and the appendices on the second moment), measured on the checkpoints of a run."""
