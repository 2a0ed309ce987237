// Names, and access by keys, that the theme leaves out. It makes some elements later, so changes are watched.
function amend() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, at) => nav.setAttribute("aria-label", `Code block ${at + 1}`));
  for (const region of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) region.tabIndex = 0;
  for (const head of document.querySelectorAll("th:empty")) head.replaceWith(document.createElement("td"));
}
amend();
new MutationObserver(amend).observe(document.body, { childList: true, subtree: true });
