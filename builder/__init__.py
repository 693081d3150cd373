"""What an image build or a first start runs: demo model, weight download, smoke test."""
