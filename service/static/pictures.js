// ---- Pictures of a chat: chosen, dropped or pasted, and sent as data URLs -------------------------------------------

const READ_TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif"]; // other types that the browser reads are converted
const MOST_BYTES = 500_000; // of a file that is sent as it is; larger ones are drawn smaller
const MOST_SIDE = 1536; // pixels of a picture that is drawn smaller
let attached = []; // data URLs of the message that is being written

const canSee = () => Boolean(model.capabilities?.some((able) => able.name === "chat_image"));
const textOf = (content) => (typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join(""));
const urlsOf = (content) => (typeof content === "string" ? [] : (content ?? []).flatMap((part) => part.image_url?.url ?? []));

/** Return the content of a message of text and the attached pictures. */
function contentOf(text) {
  if (!attached.length) return text;
  const parts = attached.map((url) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

/** Attach image files; the first that cannot be read is told. */
async function attach(files) {
  clearError();
  for (const file of files) {
    try {
      attached.push(await dataUrl(file));
    } catch {
      showError(new Refusal({ message: `${file.name} is not a picture that this browser reads`, param: "messages" }));
      break;
    }
  }
  drawAttached();
  refreshChat();
}

async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  const blob = READ_TYPES.includes(file.type) && file.size <= MOST_BYTES ? file : await drawnSmaller(bitmap);
  bitmap.close();
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(blob);
  });
}

function drawnSmaller(bitmap) {
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", { width: Math.max(1, bitmap.width * scale), height: Math.max(1, bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
}

function drawAttached() {
  $("attached").replaceChildren(...attached.map((url, at) => {
    const remove = actButton("Remove", () => { attached.splice(at, 1); drawAttached(); refreshChat(); });
    remove.ariaLabel = `Remove picture ${at + 1}`;
    return make("figure", {}, make("img", { src: url, alt: `Picture ${at + 1}` }), remove);
  }));
}

function picturesView(content) {
  return make("div", { className: "pictures" }, ...urlsOf(content).map((url, at) => make("img", { src: url, alt: `Picture ${at + 1}` })));
}

/** Return a command with each picture read from a file, whose name says which it is. */
function withFiles(command) {
  let number = 0;
  return command.replace(/(data:image\/(\w+);base64,)[A-Za-z0-9+/=]+/g, (_, head, type) => `${head}'"$(base64 -w0 picture${++number}.${type})"'`);
}

function openPictures() {
  $("with-pictures").hidden = !canSee();
  if (!canSee()) attached = [];
  drawAttached();
}

function listenToPictures() {
  const taken = (event, given) => {
    const files = [...(given?.files ?? [])].filter((file) => file.type.startsWith("image/"));
    if (!canSee() || !files.length) return;
    event.preventDefault();
    attach(files);
  };
  $("picture").addEventListener("change", () => { attach([...$("picture").files]).finally(() => { $("picture").value = ""; }); });
  $("message").addEventListener("paste", (event) => taken(event, event.clipboardData));
  $("chat").addEventListener("drop", (event) => taken(event, event.dataTransfer));
  $("chat").addEventListener("dragover", (event) => {
    if (canSee() && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
}
