"""Solving a merged model layer by layer on data: what the methods reconstruct and regmean++ share."""
