// Before anything is drawn: the theme that was chosen on this page, if one was.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("headrace.theme");
  } catch {} // storage may be forbidden
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
