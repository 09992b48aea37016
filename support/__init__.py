"""Helpers of the programs. Without this file another `support` on PYTHONPATH would go first."""
