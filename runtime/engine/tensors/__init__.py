"""Tensors between devices and processes: conversion, checksums, direct links (BL-33)."""
