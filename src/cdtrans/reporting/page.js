// The gallery's filter. Without scripts it stays hidden and every pair is shown.
(function () {
  const form = document.getElementById("filter");
  if (!form) return;
  const pairs = Array.from(document.querySelectorAll(".pair"));
  const shown = document.getElementById("shown");
  function update() {
    const wanted = new FormData(form);
    let count = 0;
    for (const pair of pairs) {
      const fits = ["class", "round", "state"].every((key) => {
        const value = wanted.get(key);
        return value === "" || pair.dataset[key].split("\t").includes(value);
      });
      pair.hidden = !fits;
      count += fits;
    }
    shown.textContent = count + " of " + pairs.length + " pairs";
  }
  form.hidden = false;
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();

// A link to a folded section opens it, and paper has everything.
(function () {
  function open() {
    const section = document.getElementById(location.hash.slice(1));
    const part = section && section.querySelector(":scope > details.part");
    if (part) part.open = true;
  }
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();

// Names of groups become an answers file. Without scripts the fields stay hidden.
(function () {
  const form = document.getElementById("groups");
  if (!form) return;
  const quoted = (text) => (/[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
  for (const part of form.querySelectorAll("[hidden]")) part.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const rows = ["path,label,part"];
    for (const field of form.querySelectorAll("input")) {
      const name = field.value.trim();
      if (name) for (const path of JSON.parse(field.dataset.paths)) rows.push([path, name, "group"].map(quoted).join(","));
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([rows.join("\r\n") + "\r\n"], { type: "text/csv" }));
    link.download = "groups.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
