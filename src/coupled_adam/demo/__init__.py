"""The demo: one small model trained twice, with AdamW and with CoupledAdamW, on text every Python brings along."""
